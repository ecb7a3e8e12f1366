"""What runs in the driver and worker processes of tests that kill them."""
