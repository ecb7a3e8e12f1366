"""Help for tests of programs that use Tidemill."""
