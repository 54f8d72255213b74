"""A project's decisions about findings: pure functions from report to report."""
