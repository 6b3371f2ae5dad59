"""`toolkit inspect`: what is in a plan, as text, JSON or one HTML page, and what differs between two."""
