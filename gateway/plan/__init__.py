"""How large everything is: one plan for the machine, each number with its reason."""
