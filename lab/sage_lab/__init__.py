"""sage_lab: what measures, trains and compiles, and writes the records that the course reads."""
