"""What stays finite, beside the same steps in fp32."""
