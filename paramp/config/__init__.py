"""The configuration: its schema, the files that it is read from, the pipeline schedules."""
