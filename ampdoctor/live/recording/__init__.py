"""What a loop that is somebody else's does in a step, recorded so that the step can be run again."""
