"""What a loop takes in and takes up, heard at no cost: its data, the time it waits for them, its memory."""
