"""One thin file a command: parse, call the workflow, render."""
