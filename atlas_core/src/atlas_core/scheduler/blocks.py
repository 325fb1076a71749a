"""Pages of a cache group, and who holds them."""

from collections.abc import Iterable

from atlas_core.vocab.errors import EngineError


class BlockPool:
    """Pages of one cache group, with reference counts: a page may stand in several block tables."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with one reference each.

        Raises EngineError when fewer are free; the caller asks ``free`` first.
        """
        if count > len(self._free):
            raise EngineError(
                f"{count} pages were asked for and {len(self._free)} are free", "the caller did not check"
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, page: int) -> None:
        """One more holder of a page in use. Raises EngineError for a free page."""
        self._held(page)
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less of each page; the last one frees it. Raises EngineError for a free page."""
        for page in pages:
            self._held(page)
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Compare with the pages that all holders together say they hold.

        Raises EngineError at the first difference.
        """
        count = [0] * self.pages
        for page in held:
            count[page] += 1
        if count != self._references:
            wrong = next(page for page in range(self.pages) if count[page] != self._references[page])
            raise EngineError(f"page {wrong} has {self._references[wrong]} references and {count[wrong]} holders")
        if sorted(self._free) != [page for page in range(self.pages) if not count[page]]:
            raise EngineError("the list of free pages is not the list of pages without a holder")

    def _held(self, page: int) -> None:
        if not self._references[page]:
            raise EngineError(f"page {page} is used after it was given back", "two holders think that it is theirs")
