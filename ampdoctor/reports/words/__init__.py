"""What every form says alike: words, places, lines to paste, the next step."""
