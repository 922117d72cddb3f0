"""SLA2 forward: level by level."""
