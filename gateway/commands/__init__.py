"""Commands that run a process or prepare one."""
