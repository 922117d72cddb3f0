"""SLA2 backward."""
