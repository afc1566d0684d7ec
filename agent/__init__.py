"""Reads the machine: samplers, schedule, history, traces, configuration and the command line."""
