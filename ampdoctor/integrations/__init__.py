"""Where people are: one file a framework or a tool."""
