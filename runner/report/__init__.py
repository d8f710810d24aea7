"""What people read: console lines and status."""
