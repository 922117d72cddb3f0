"""What the course needs beside the library: README tables, helpers of notebooks, verdicts, figures."""
