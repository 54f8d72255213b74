"""What a user has decided about findings, before they count: pure functions from report to report."""
