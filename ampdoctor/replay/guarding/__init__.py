"""What the user's code does to the folder that they work in: told, and stopped where it was called only to build."""
