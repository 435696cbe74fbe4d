"""`sluice host`: run a worker host, which serves several models in turns."""

from gateway.commands.worker import PROGRAM, program_command

command = program_command("host", (*PROGRAM[:-1], "worker.hosting"))
