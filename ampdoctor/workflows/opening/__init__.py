"""A run made ready to be asked: its request, its parts, the step that fires, its history."""
