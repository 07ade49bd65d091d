"""Plans for unlike devices: what a step costs, and the plan that makes it shortest. Pure, but for ``profile``."""
