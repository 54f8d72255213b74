"""A recorded step as a folder that replays on another machine."""
