"""The configuration: layout, whole schema, the files it is read from, and the table of pipeline schedules."""
