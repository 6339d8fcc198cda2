"""Who a site is, and whom it believes."""
