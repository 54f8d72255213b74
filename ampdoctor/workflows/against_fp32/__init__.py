"""Compares what stays finite with the same steps in fp32."""
