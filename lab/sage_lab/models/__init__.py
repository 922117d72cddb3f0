"""Models small enough to read in one sitting, with attention chosen by name."""
