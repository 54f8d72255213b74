"""The text of the user's files: what is found in it, and how it is rewritten. Nothing is run for it."""
