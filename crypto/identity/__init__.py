"""Who a site is, and whom it believes."""

# Of a certificate, at most. Here fedctl's help reads it without loading ``cryptography``.
MAX_DAYS = 20 * 366
