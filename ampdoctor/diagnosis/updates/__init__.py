"""Rules on what a step writes, tensor by tensor, beside the same step in fp32."""
