"""One pool of workers for many clients."""
