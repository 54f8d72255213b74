"""What the human form is put together from: pieces drawn to a console."""
