"""Tables, numbers and verdicts that pages and notebooks read from the records."""
