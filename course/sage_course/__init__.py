"""What the course needs beside the library: tables of results, verdicts, figures, helpers of notebooks."""
