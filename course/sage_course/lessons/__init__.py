"""What belongs into the cells to fill in: a module per notebook, with its functions and GAPS, {name: Gap}."""
