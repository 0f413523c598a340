"""The command line, the log of a run, its page and plots, verify and doctor."""
