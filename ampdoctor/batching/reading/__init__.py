"""The batch in force, as frameworks' configurations say it. Nothing of a file is executed, and no variable expanded."""
