"""Plain frozen data that all packages use: addresses, traces, ranges, checkpoint summaries, findings, reports."""
