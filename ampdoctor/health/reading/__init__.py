"""Reading any log as lines of ours."""
