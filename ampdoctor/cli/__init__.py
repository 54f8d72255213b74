"""The command line: one thin file a command, which parses, calls a workflow and renders its report."""
