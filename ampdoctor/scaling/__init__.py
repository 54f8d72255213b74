"""Loss scaling without a training run: the scalers' exact rules, closed forms from a trace, and the choice."""
