"""A site under faults for minutes or hours: what runs, who asks, what breaks, what is told."""
