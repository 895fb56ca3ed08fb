"""HTTP requests to URLs that clients supply: connections are made only to addresses that were checked."""
