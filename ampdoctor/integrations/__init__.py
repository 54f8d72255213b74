"""Integrations: one file for each framework or tool."""
