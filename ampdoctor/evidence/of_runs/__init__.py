"""What a replayed or watched run has shown."""
