"""What to do where a GradScaler refuses a call although the order of calls is right."""

HALF_WEIGHTS = (
    "make the trained weights in fp32 (no model.half(); from_pretrained(..., dtype=torch.float32)) and leave half to "
    "autocast; pure half needs no GradScaler"
)
WITHOUT_GRADIENTS = "give scaler.step an optimizer whose parameters got gradients in this step"
NOT_THE_ORDER = (HALF_WEIGHTS, WITHOUT_GRADIENTS)
"""Changes of a misuse (AMP407) beside which the recipe's order of calls would mislead."""
