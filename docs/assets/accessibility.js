// What the theme lacks for keyboards and screen readers: wide tables can be scrolled by keyboard, the search has a name.
const prepare = () => {
  document.querySelector("[data-md-component=search]")?.setAttribute("aria-label", "Search");
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1;
  }
};

document$.subscribe(prepare);
addEventListener("resize", prepare);
