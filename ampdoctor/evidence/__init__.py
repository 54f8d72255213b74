"""Plain frozen data that every room uses: where, traces, ranges, checkpoint summaries, findings, reports."""
