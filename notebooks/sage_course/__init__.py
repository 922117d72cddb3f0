"""The course: checks of cells to fill in, lessons, figures, tables of results, helpers of notebooks."""
