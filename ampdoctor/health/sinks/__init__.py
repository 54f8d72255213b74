"""Exports of a log's numbers and alerts to other tools."""
