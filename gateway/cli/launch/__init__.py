"""`sluice up`: all processes on one machine."""
