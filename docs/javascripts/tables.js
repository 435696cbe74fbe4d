// Wide tables scroll in boxes that the theme makes; the keyboard has to reach them.
new MutationObserver(() => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) each.tabIndex = 0;
}).observe(document.body, { childList: true, subtree: true });
