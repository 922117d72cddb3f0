"""Tables and numbers that pages and notebooks read from the records."""
