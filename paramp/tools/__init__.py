"""The command line and the train script's tools."""
